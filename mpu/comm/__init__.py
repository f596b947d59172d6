# SPDX-License-Identifier: Apache-2.0
"""Communication between ranks. The group of ranks is always an explicit argument: an Axis.

transport         Axis, Transport (the backend of an axis), Handle (a collective in flight)
collectives       the collectives, and ProcessGroupTransport (torch.distributed)
mappings          the collectives under autograd, each with its conjugate
p2p               messages between pipeline stages
shared_memory     the collectives through memory shared by the ranks of one host; built on symmetric
                  (that memory and its flags) and workspace (two slots of it)
symmetric_cuda    memory of one GPU that the others write to
meta              a transport of shapes only, for estimates without a run
waits             records what this rank waits for, and for how long
"""
