# SPDX-License-Identifier: Apache-2.0
"""The optimizer over ZeRO's buckets.

interface   UpdateRule and Updater: the properties of an optimizer, and its update
optimizer   Optimizer: clip, update, gather; masters and state by parameter name
adam        AdamW
muon        Muon, which needs full matrices; newton_schulz: its iteration
matrix_exchange   assembles full matrices from the ranks' slices, and sends their updates back
owners      which rank owns which matrix, and the messages for it
adam_backends   AdamW's other kernels: apex and Transformer Engine
offload     masters and state in host memory, updated there
state_offload  masters and state in host memory between steps, updated on the device
"""
