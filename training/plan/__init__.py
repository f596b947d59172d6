# SPDX-License-Identifier: Apache-2.0
"""Work out what a Config means: stages, batches, learning rate, memory, traffic. No ranks."""
