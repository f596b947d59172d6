# SPDX-License-Identifier: Apache-2.0
"""The model-parallel unit: everything that knows there is more than one rank. A table of contents.

grid          ranks -> axes: who is my tensor-, data-, pipeline-parallel peer
context       LayerContext, the one object a layer is given
param         what a parameter knows of its place; where its gradient goes
recompute     activation recomputation
comm          collectives (raw verbs), mappings (autograd pairs), p2p (stage to stage), watch (the
              failure channel)
layers        linear, embedding, cross_entropy, norm, rope, attention, swiglu
pipeline      schedules as data, and the engine that executes them
zero          gradient buckets and the distributed optimizer
native        the compiled library of csrc/, where there is one
"""
