# SPDX-License-Identifier: Apache-2.0
"""Turn a command line into one checked Config: the flags and the rules between them."""
