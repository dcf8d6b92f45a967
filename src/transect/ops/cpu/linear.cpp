// The products of the kinds that TRANSECT_KINDS lists, such as "Q4_0, Q5_0". build.py compiles this file once for each
// list, side by side.
#include <tuple>
#include "linear.h"

namespace transect {

template <int KIND>
constexpr auto rounded_span() {
  if constexpr (PAIRS && Weights<KIND>::PAIRED) return &rounded_span_of<Weights<KIND>>;
  else return nullptr;
}
template <int... LISTED>
constexpr auto spans() { return std::tuple{&linear_span_of<Weights<LISTED>>..., rounded_span<LISTED>()...}; }

// Whose address is taken here is compiled here.
__attribute__((used)) static const auto compiled = spans<TRANSECT_KINDS>();

}  // namespace transect
