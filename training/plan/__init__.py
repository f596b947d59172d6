# SPDX-License-Identifier: Apache-2.0
"""What a Config means, by arithmetic alone: stages, batches, learning rate, memory, traffic."""
