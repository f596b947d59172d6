# SPDX-License-Identifier: Apache-2.0
"""Files that others may have written, and files that a run may replace.

untrusted    open plain files within limits, print their text safely, keep own files private
owned        replace and remove only what the same purpose wrote before
written      a record of the files and folders that a purpose has written
"""
