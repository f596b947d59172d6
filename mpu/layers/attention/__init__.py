# SPDX-License-Identifier: Apache-2.0
"""Attention: one rank's core, blocks of it for documents and windows, and context parallelism."""
