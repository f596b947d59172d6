# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: schedules lists what each rank does, simulate proves and times that, layout
puts layers on stages, engine executes, timeline and draw give the numbers and a picture of a step.
"""
