# SPDX-License-Identifier: MIT
"""What surrounds the core, a folder or a file each."""
