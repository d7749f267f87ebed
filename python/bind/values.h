// values.h: how the extension's functions name a rank and a cache group of a side, and a path that keeps its plan.  Stage: python.
#pragma once

#include <memory>
#include <string>

#include "kvloom/geometry/side.h"
#include "kvloom/plan/plan.h"

namespace kvloom::python {

// @error out_of_range: the side has no such rank
Rank checked(const Side& side, std::int32_t rank);
// Index in side.groups().  @error invalid_argument: no such group, with those that there are
std::int32_t group_index(const Side& side, const std::string& group);

// A Path looks into its plan, and here holds it: Python may let go of the plan first.
struct HeldPath {
  std::shared_ptr<const Plan> plan;  // shared with Python's Plan and its other paths
  Path path;
};

}  // namespace kvloom::python
