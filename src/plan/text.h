// text.h: a plan as text that people read and diff, and that reads back.  Stage: compile.
// A plan follows from its two sides and the total, so only these are read; the plan is compiled again and must print the same
// text. Hence no text can make a plan that breaks a law.  Law (check_plan_text): parse_plan(to_string(plan)) prints the same.
//
//   kvloom plan 1
//   tokens inf                              the request's, where the plan depends on it
//   source | target                         each followed by its side's lines (geometry/side_text.h)
//   meet latent                             for each group: where parts meet, source part > target part; only those that do
//     layers 3 > 0: 30+10                   ordinals of the target's layer list
//     heads 0 > 0: 0+1
//     tokens 0 > 1: 64+64/256*inf
//     senders 0.0.0: 8 replicas, targets 0-3, 0 of them whole, 4 by layers     where several ranks hold a part (plan.h: Senders)
//   digest 0123456789abcdef0123456789abcdef of all lines before
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "kvloom/base/error.h"
#include "kvloom/plan/plan.h"

namespace kvloom {

std::string to_string(const Plan& plan);

// @error parse: the first line that is not as the plan of the text's two sides has it: its number, what stands there, what was
//        expected; exhausted: too much of anything; what compile and the factories refuse
Expected<Plan> parse_plan(std::string_view text);

// 128 bits of XXH3 over the text form, 32 hex digits: what both sides of a transfer compare.
std::string digest(const Plan& plan);

// compile() for sides that a peer gave: bounded before any work.  @error exhausted: over 2^17 (groups x pairs of ranks)
Expected<Plan> compile_read(std::shared_ptr<const Side> source, std::shared_ptr<const Side> target, std::int64_t total);

}  // namespace kvloom
