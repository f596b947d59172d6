# SPDX-License-Identifier: Apache-2.0
"""The failure channel: which rank failed first, which one hangs, which link is dead.

monitor       FailureMonitor, a rank's end of the channel
coordinator   Coordinator, a thread of rank 0, decides on one first cause and sends it to all
wire          the hello of a rank, and frames of a connection
messages      the channel's kinds of messages and their fields
hang_watch    whether this rank makes progress, and where it is
hang_detector which rank hangs, from the reports of all ranks
process       another rank's process on this host: stopped, or its Python interpreter is blocked
links         connections to other hosts that are dead
address       on which address a rank listens
activity      what this process does, in words
store         what ranks wait for in the store at which they meet, and which ranks are late
"""
