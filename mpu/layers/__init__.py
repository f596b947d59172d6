# SPDX-License-Identifier: Apache-2.0
"""Hand-written parallel layers: what is cut, what is gathered, and when, forward and backward."""
