# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism.

schedules      the ordered actions of each rank: a pure function for each schedule
steps          the messages between the actions of a schedule
stage_layout   which layers each stage has
engine         executes any schedule

simulate.py validates and times a schedule without a run.
"""
