# SPDX-License-Identifier: Apache-2.0
"""From a command line to one checked Config: every flag, its rules, its mistakes."""
