# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism.

schedules   what each rank does, in order: a pure function for each schedule
plan        the messages that follow from it
layout      which layers each stage holds
engine      executes any schedule

estimate/simulate.py proves and times a schedule without a run.
"""
