# SPDX-License-Identifier: Apache-2.0
"""The optimizer over ZeRO's buckets: the global norm, clipping, the update, and its state."""
