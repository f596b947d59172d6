# SPDX-License-Identifier: Apache-2.0
"""Bytes between ranks. Who talks to whom is always an argument: an Axis.

transport         Axis, Transport (what carries its tensors), Handle (what is in flight)
collectives       the verbs, and ProcessGroupTransport (torch.distributed)
mappings          the verbs under autograd, each with its conjugate
p2p               messages between pipeline stages
shared_memory     the verbs through memory that the ranks of one host share; symmetric (that memory
                  and its flags) and workspace (two slots of it) are below it
symmetric_cuda    memory that GPUs write for each other
meta              shapes alone, for what is computed without a run
waits             what this rank waits for, and for how long
"""
