# SPDX-License-Identifier: Apache-2.0
"""What is computed without a run: a model's profile, memory, traffic and FLOPs of each rank."""
