# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: schedules (what each rank does, as data), simulate (proved and timed),
layout (which layers where), engine (does it), timeline and draw (numbers and a picture of it).
"""
