# SPDX-License-Identifier: MIT
# pyright: reportUnusedImport=false
"""What extensions use of the core: the only module of the core that they import."""

# Where an extension acts on a call.
from rankax.core.hooks import (
    CHOOSERS,
    FOREIGN,
    FORMS,
    Form,
    HERE,
    HINTS,
    Layout,
    METHODS,
    NODES,
    NOTES,
    NO_RULES,
    OBSERVERS,
    PASSES,
    PLACES,
    PLANNED,
    Placement,
    Rules,
    TRACED,
    TRIED,
    WARNINGS,
    is_node,
    observed,
    place_of,
)

# Options.
from rankax.core.options import (
    AUTO,
    COMPILER_RULES,
    DEFAULTS,
    Option,
    Options,
    bool_option,
    options_of,
    register,
)

# Calls.
from rankax.core.call.bind import (
    BoundKernel,
    KernelSpec,
    SPECS,
    Shell,
    bind,
    flatten,
    is_array,
    is_number,
    rebind,
)
from rankax.core.call.run import Bound, Fitted, Traced, fit, is_empty, run, traced, untraced
from rankax.core.call.nest import Begins, Nest, nest_of

# The schedule of a call.
from rankax.core.plan.schedule import (
    Chunks,
    LeafPlan,
    Level,
    Nesting,
    Schedule,
    Shape,
    Tiles,
    even_chunk_size,
    split_into_chunks,
)
from rankax.core.plan.report import untouched_line

# The program of an item.
from rankax.core.trace import programs
from rankax.core.trace.derivatives import (
    RULES,
    call_of,
    call_with_derivative_of,
    has_refs,
    keep_rules,
    new_primitive,
    of_some,
    primitive_of_program,
    uses_axis,
    vmapped,
)
from rankax.core.trace.programs import (
    ItemProgram,
    evaluate,
    evaluate_by,
    has_order,
    name_and_params,
    subprograms,
    with_axis,
    with_equations,
    with_shape,
    with_subprograms,
    with_variables,
)

# Loops over levels.
from rankax.core.loop.loop import (
    Sink,
    Store,
    Tile,
    TileSlots,
    carried_with,
    ends_of,
    first_start,
    map_level,
    new_items,
    saved,
    sinks_of,
    steps_of,
    varying_axes,
    widen,
    write_chunk,
)
from rankax.core.loop.eager_programs import (
    Mode,
    PLAIN,
    Unknown,
    call_of_kernel,
    kept_program,
    fingerprint,
    key_of_value,
    mode_of,
    opened,
    warn_once,
)
from rankax.core.loop.shared import add_exactly, narrowed
from rankax.core.loop.spec import (
    LoopSpec,
    PLACE,
    index_without_fill,
    item_key,
    item_of,
    items_at,
    lengths_of,
    own_places,
)

# Reductions.
from rankax.core.reduce.extrema import Arg, Chosen, no_index, worst_value
from rankax.core.reduce.protocol import (
    EachLeaf,
    FILL,
    Keep,
    Marked,
    MisfitError,
    Outputs,
    Place,
    Reduction,
    Several,
    count_dtype,
)
from rankax.core.reduce.row import (
    Accumulation,
    Accumulator,
    Elementwise,
    InSlots,
    Ordered,
    Row,
    State,
    Steps,
    choose,
    fill,
)
from rankax.core.reduce.run import (
    BY_NAME,
    Reductions,
    RowReduction,
    find_mask,
    read_reductions,
    trace_reduced,
)

# Kernels and their ranks.
from rankax.core.declare.dims import Dim, Rank, UnreadableError, parse_dims
from rankax.core.declare.mask import Mask, mask_rank
from rankax.core.declare.ranks import Declaration, READERS, Unpacked, ranks_of_leaves
from rankax.core.declare.split_key import SplitKey, key_rank, marked

# Words, arrays, trees and caches.
from rankax.core.base import messages
from rankax.core.base.arrays import (
    SMALL,
    Target,
    as_weak,
    counted,
    flat_index,
    gated,
    has_tangent,
    in_32_bits,
    index_dtype,
    inside_call,
    is_cpu,
    is_narrow,
    is_ref,
    is_spread,
    is_staged,
    mesh_of,
    on_mesh,
    places_of,
    scalar,
    shape_of,
    sharding_of,
    target_of,
    too_many,
    weakened,
    wide,
    zeros,
    zeros_of,
)
from rankax.core.base.cache import Kept, caches, switch
from rankax.core.base.messages import (
    argument_names,
    caller_level,
    check_bool,
    check_callable,
    checked_int,
    first_of,
    function_location,
    function_name,
    listed,
    noted_errors,
    plural,
    positive_int,
    table,
    traced_as,
    unwrapped,
)
from rankax.core.base.trees import (
    ByKey,
    Items,
    check_leaves,
    check_outputs,
    children_of,
    entries,
    field_names,
    is_leaf,
    leaves_with_names,
    spread_prefix,
    type_name,
)
