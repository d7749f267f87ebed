// What PageLayout::planes accepts has no byte twice, and what it refuses for that has: against a walk over all bytes.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <set>

#include "kvloom/geometry/page_layout.h"

namespace kvloom {
namespace {

bool shares_no_byte(std::int64_t heads, std::int64_t page_tokens, const std::vector<PlaneLayout>& planes) {
  std::set<std::int64_t> seen;
  for (const PlaneLayout& plane : planes)
    for (std::int64_t slot = 0; slot < page_tokens; ++slot)
      for (std::int64_t head = 0; head < heads; ++head)
        for (std::int64_t byte = 0; byte < plane.bytes; ++byte)
          if (!seen.insert(plane.at(slot, head, byte)).second) return false;
  return true;
}

RC_GTEST_PROP(PageLayoutPlanes, AreAcceptedIfAndOnlyIfTheyShareNoByte, ()) {
  const std::int64_t heads = *rc::gen::inRange(1, 4), tokens = *rc::gen::inRange(1, 5);
  std::vector<PlaneLayout> planes;
  for (int n = *rc::gen::inRange(1, 4); n > 0; --n) {
    const std::int64_t element = *rc::gen::inRange(1, 3), elements = *rc::gen::inRange(1, 4);
    planes.push_back({"p" + std::to_string(n), *rc::gen::inRange(0, 40), *rc::gen::element(1, 2, 4, 6, 12, 24, 48),
                      *rc::gen::element(1, 2, 4, 6, 12, 24, 48), element * elements, *rc::gen::element(0, 0, 1, 2, 4, 8, 12),
                      element});
  }
  const bool accepted = PageLayout::planes(heads, tokens, 100'000, planes).has_value();
  RC_CLASSIFY(accepted);
  RC_ASSERT(accepted == shares_no_byte(heads, tokens, planes));
}

}  // namespace
}  // namespace kvloom
