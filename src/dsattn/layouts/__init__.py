"""Where tokens are: causal layouts, context-parallel rows and the id spaces of a selection, exact integers only."""

from dsattn.layouts.causal import CausalLayout, Segment
from dsattn.layouts.context_parallel import context_parallel_positions, gather_order
from dsattn.layouts.device import DeviceLayout
from dsattn.layouts.ids import TopK

__all__ = ["CausalLayout", "DeviceLayout", "Segment", "TopK", "context_parallel_positions", "gather_order"]
