# SPDX-License-Identifier: Apache-2.0
"""Bytes between ranks. Groups always come as arguments, inside an Axis."""
