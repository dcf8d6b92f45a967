// The products of the kinds that TRANSECT_KINDS lists, such as "Q4_0, Q5_0". build.py compiles this file once for each
// list, side by side.
#include "linear.h"

namespace transect {

template <int... LISTED>
constexpr auto spans() { return std::array{&linear_span_of<Weights<LISTED>>...}; }

// Whose address is taken here is compiled here.
__attribute__((used)) static const auto compiled = spans<TRANSECT_KINDS>();

}  // namespace transect
