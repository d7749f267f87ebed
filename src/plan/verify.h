// verify.h: the proof that a plan writes every wanted byte exactly once.  Stage: compile.  Separate code from compile: it looks at the
// finished plan only.  Symbolic: intervals, residues and counts over one common period; nothing is enumerated, no length matters.
// The argument, for each group:
//   1. On each axis the source's parts are disjoint, and each meeting lies in its two parts, so one target part's meetings are disjoint.
//   2. On each axis the meetings of one target part have, together, as many members as that part. By 1 they are exactly it.
//   3. So the products of meetings tile the target rank's product. Each needs a source rank with these three parts: some replica holds it.
//   4. The replicas' shares of a consumer's layers are disjoint and together all of them.
#pragma once

#include "kvloom/base/error.h"
#include "kvloom/plan/plan.h"

namespace kvloom {

// @error unsupported: the group, the axis and the parts where a step fails: wanted bytes that no source rank holds
Expected<void> prove_exact_cover(const Plan& plan);

}  // namespace kvloom
