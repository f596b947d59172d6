# SPDX-License-Identifier: Apache-2.0
"""The model-parallel unit: everything that knows there is more than one rank. A table of contents.

grid          ranks -> axes: who is my tensor-, data-, pipeline-parallel peer
context       LayerContext, the one object a layer is given
param         what a parameter knows of its place; where its gradient goes
recompute     activation recomputation
comm          collectives (raw verbs), mappings (autograd pairs), overlap (matmuls that hide them),
              p2p (stage to stage), watch (the failure channel)
kernels       Triton kernels that multiply while parts travel between GPUs
layers        linear, embedding, cross_entropy, norm, rope, attention, swiglu
pipeline      schedules as data, the engine that executes them, which layers stand where
zero          gradient buckets, the distributed optimizer, weights gathered for their use
native        the compiled library of csrc/, where there is one
"""
