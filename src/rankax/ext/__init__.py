# SPDX-License-Identifier: MIT
# pyright: reportUnusedImport=false
"""What surrounds the core, a folder or a file each; to import it registers it."""

import rankax.ext.annotations
import rankax.ext.batched
import rankax.ext.blocks.arrays
import rankax.ext.blocks.call
import rankax.ext.bucket
import rankax.ext.check.ragged
import rankax.ext.cpu_math
import rankax.ext.devices.call
import rankax.ext.explain.call
import rankax.ext.jit
import rankax.ext.lanes.walker
import rankax.ext.memory.choose
import rankax.ext.progress
import rankax.ext.ragged.results
import rankax.ext.ragged.type
import rankax.ext.reductions
import rankax.ext.tune.measure
import rankax.ext.xla_cpu.rules
