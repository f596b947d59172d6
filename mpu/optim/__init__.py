# SPDX-License-Identifier: Apache-2.0
"""The optimizer over ZeRO's buckets.

interface   UpdateRule and Updater: what an optimizer declares, and how it updates
optimizer   Optimizer: clip, update, gather; masters and state by parameter name
adam        AdamW
backends    AdamW's other kernels: Triton, apex, Transformer Engine
offload     masters and state in host memory
"""
