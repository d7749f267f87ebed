// html.h: a plan as a picture: one page without any outside resource.  Stage: tools.
// Three parts: bands (prefill ranks x layers), stripes (decode ranks x tokens), and between them the matrix of paths; the path
// under the pointer, or chosen by the keyboard, is lit in all three and described beside them. "#path=3-1" in the address lights
// one from the start.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "kvloom/plan/plan.h"
#include "kvloom/tools/measure.h"

namespace kvloom {

// `range`: what the paths were counted for; none: a plan of any length, drawn with its families only.
std::string plan_html(const Plan& plan, const std::vector<MeasuredPath>& paths, std::optional<TokenRange> range);

}  // namespace kvloom
