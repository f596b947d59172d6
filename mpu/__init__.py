# SPDX-License-Identifier: Apache-2.0
"""The model-parallel unit: what runs one model over several ranks. A table of contents.

comm          between ranks: transport (Axis, Transport, Handle), collectives, mappings (collectives
              under autograd), p2p (stage to stage), meta (shapes alone), shared_memory and
              symmetric (memory that ranks share), waits (what a rank waits for, and how long)
grid          ranks -> axes: the tensor-, context-, data- and pipeline-parallel peers of a rank
connect       what carries each axis of a run: shared memory or the process group
param         Placement: which part of a tensor a parameter is, and who holds the rest
gradients     where layers put weight gradients, and when these are computed
context       LayerContext, the one object a layer is given
recompute     activation recomputation
auxiliary_loss  what a block adds to the loss
kernels       Triton kernels: matmuls while rows travel between GPUs, what stands between matmuls
overlap       collectives hidden by the matmul beside them, and which matmul takes which method
layers        linear, embedding, cross_entropy, rope, fused (RMSNorm, RoPE, SwiGLU); attention and
              float8 have folders of their own
pipeline      schedules as data, the engine that executes them, which layers each stage holds
zero          flat buckets of weights and gradients, and their sums
optim         the distributed optimizer: norm, clip, update, state, offload
launcher      which launcher started this process
native        the loader of the compiled library of csrc/
"""
