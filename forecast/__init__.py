# SPDX-License-Identifier: Apache-2.0
"""What a run would do, by recording the program itself, above which this room stands.

recording    the program's own step, as one rank of any world, on tensors without memory
traffic      what a rank sends in it
"""
