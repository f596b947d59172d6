# SPDX-License-Identifier: Apache-2.0
"""Collectives and messages between ranks. A group is always an argument, inside an Axis."""
