# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism.

schedules      what each rank does, in order: a pure function for each schedule
steps          the messages that follow from it
stage_layout   which layers each stage has
engine         executes any schedule

simulate.py proves and times a schedule without a run.
"""
