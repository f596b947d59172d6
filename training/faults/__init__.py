# SPDX-License-Identifier: Apache-2.0
"""The failure channel: which rank failed first, which one hangs, which link is dead.

monitor       FailureMonitor, a rank's end of the channel
coordinator   Coordinator, a thread of rank 0, decides on one first cause and sends it to all
wire          the hello of a rank, and frames of a connection
messages      the channel's kinds of messages and their fields
hang_watch    whether this rank makes progress, and where it is
hang_detector which rank hangs, from the reports of all ranks
process       another rank's process on this host: stopped, or its Python interpreter is blocked
links         dead connections to other hosts
address       the address at which a rank listens
activity      the activity of this process, in words
store         waits for keys of the rendezvous store, and reports on late ranks
"""
