# SPDX-License-Identifier: Apache-2.0
"""The distributed optimizer: gradients and optimizer state in flat buckets."""
