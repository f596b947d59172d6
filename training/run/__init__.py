# SPDX-License-Identifier: Apache-2.0
"""What a process does around its steps: start, save, stop, log, report."""
