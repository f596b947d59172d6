# SPDX-License-Identifier: Apache-2.0
"""Architectures, one file each. Fork llama.py."""
