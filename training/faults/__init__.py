# SPDX-License-Identifier: Apache-2.0
"""The failure channel: which rank failed first, which one hangs, which link is dead.

monitor       FailureMonitor, a rank's end of the channel
coordinator   Coordinator, a thread of rank 0, decides on one first cause and sends it to all
door          who may join, and which seat is whose; of the supervisors (tools/supervise.py), too
wire          the one wire: handshake and frames
messages      the channel's kinds of messages and their fields
hang_watch    whether this rank moves, and where it stands
hang_judge    which rank hangs, from what all ranks say
process       another rank's process on this host: stopped, or its Python stands still
links         connections to other hosts that are dead
address       on which address a rank listens
"""
