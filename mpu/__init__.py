# SPDX-License-Identifier: Apache-2.0
"""The model-parallel unit: everything that knows there is more than one rank. A table of contents.

comm          bytes between ranks: transport (axes, and what carries them), collectives (the verbs),
              mappings (autograd pairs), overlap (matmuls that hide them), p2p (stage to stage),
              failure_monitor (the failure channel)
grid          ranks -> axes: who is my tensor-, data-, pipeline-parallel peer
connect       what carries each axis of a run: shared memory or the process group
param         what a parameter knows of its place
gradients     where layers put weight gradients, and when these are computed
context       LayerContext, the one object a layer is given
recompute     activation recomputation
kernels       Triton kernels that multiply while parts travel between GPUs
layers        linear, embedding, cross_entropy, attention, rope, fused (RMSNorm, RoPE, SwiGLU), tune
pipeline      schedules as data, the engine that executes them, which layers stand where
zero          flat buckets of weights and gradients, their sums, the distributed optimizer
native        the compiled library of csrc/, where there is one
"""
