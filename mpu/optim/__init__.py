# SPDX-License-Identifier: Apache-2.0
"""The optimizer over ZeRO's buckets.

interface   UpdateRule and Updater: what an optimizer declares, and how it updates
optimizer   Optimizer: clip, update, gather; masters and state by parameter name
adam        AdamW
muon        Muon, which takes full matrices; newton_schulz: its iteration
matrix_exchange   full matrices for a rule, and their updates back, over the ranks that share them
owners      which rank owns which matrix, and what is sent for it
adam_backends   AdamW's other kernels: Triton, apex, Transformer Engine
offload     masters and state in host memory, updated there
state_offload  in host memory between steps, updated on the device
"""
