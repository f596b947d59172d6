# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: schedules lists what each rank does, plan its messages, layout puts layers
on stages, engine executes. estimate/simulate.py proves and times a schedule without a run.
"""
