#include "kvloom/session/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <array>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/shapes/shapes.h"

namespace kvloom {
namespace {

using nlohmann::json;
using shapes::holds;
using shapes::says;
using namespace std::chrono_literals;
using testing::ElementsAre;

json read(const std::string& text) {
  json file = json::parse(text, nullptr, false);
  EXPECT_FALSE(file.is_discarded()) << text;
  return file;
}

// What the format asks of each event.  Source: "Trace Event Format", Google 2016.
Expected<void> check_event(const json& event) {
  const auto has = [&](const char* field, auto is) { return event.contains(field) && (event[field].*is)(); };
  const auto refuse = [&](const char* why) { return fail(Code::parse, "{}: {}", why, event.dump()); };
  if (!has("ph", &json::is_string) || !has("pid", &json::is_number_integer) || !has("name", &json::is_string))
    return refuse("no ph, pid or name");
  const std::string ph = event["ph"];
  if (ph == "M") return has("args", &json::is_object) ? Expected<void>() : refuse("no args");
  if (!has("ts", &json::is_number)) return refuse("no ts");
  if (ph == "C") {
    if (!has("args", &json::is_object) || !event["args"].front().is_number()) return refuse("no value");
    return {};
  }
  if (!has("tid", &json::is_number_integer) || !has("cat", &json::is_string)) return refuse("no tid or cat");
  if (ph == "X" && (!has("dur", &json::is_number) || event["dur"] < 0)) return refuse("no dur");
  if (ph == "i" && (!event.contains("s") || event["s"] != "t")) return refuse("no scope");
  if (ph != "X" && ph != "i") return refuse("an unknown ph");
  return {};
}

std::int64_t nanos(const json& micros) { return std::llround(micros.get<double>() * 1000); }

// On one line spans lie in each other or apart: what a viewer can draw.
Expected<void> check_lines(const json& file) {
  std::map<std::pair<std::int64_t, std::int64_t>, std::vector<std::pair<std::int64_t, std::int64_t>>> lines;  // nanoseconds
  for (const json& event : file["traceEvents"])
    if (event["ph"] == "X") {
      const std::int64_t begin = nanos(event["ts"]);
      lines[{event["pid"], event["tid"]}].emplace_back(begin, begin + nanos(event["dur"]));
    }
  for (const auto& [line, spans] : lines)
    for (const auto& [a, a_end] : spans)
      for (const auto& [b, b_end] : spans)
        if (a < b && b < a_end && a_end < b_end) return fail(Code::parse, "tid {}: {} and {} cross", line.second, a, b);
  return {};
}

Expected<void> check_file(const json& file) {
  if (!file.is_object() || !file.contains("traceEvents")) return fail(Code::parse, "no traceEvents");
  for (const json& event : file["traceEvents"])
    if (auto law = check_event(event); !law) return law;
  return check_lines(file);
}

std::vector<json> of_kind(const json& file, const char* ph) {
  std::vector<json> out;
  for (const json& event : file["traceEvents"])
    if (event["ph"] == ph) out.push_back(event);
  return out;
}

// Names that the file gives, as "pid: name" and "pid.tid: name".
std::vector<std::string> names(const json& file) {
  std::vector<std::string> out;
  for (const json& event : of_kind(file, "M")) {
    if (event["name"] == "process_name")
      out.push_back(fmt::format("{}: {}", event["pid"].dump(), event["args"]["name"].get<std::string>()));
    if (event["name"] == "thread_name")
      out.push_back(fmt::format("{}.{}: {}", event["pid"].dump(), event["tid"].dump(), event["args"]["name"].get<std::string>()));
  }
  return out;
}

TransferKey named(std::string name = "req-7") { return {std::move(name), Epoch(2)}; }

TEST(Trace, IsThisFile) {
  Trace trace("prefill rank 3", 41);
  const TrackId compute = trace.track("layer compute"), posts = trace.track("to decode rank 1");
  trace.span(compute, "engine", "layer", 1'000'001us + 500ns, 1'000'004us, {.layer = LayerId(5)});
  trace.span(posts, "session", "post", 2s, 2s + 1ms,
             {.transfer = named(), .layer = LayerId(5), .tokens = TokenRange{0, 16}, .bytes = Bytes(4096)});
  trace.instant(posts, "session", "granted", 3s, {.transfer = named()});
  trace.counter("in flight", "bytes", 4s, 4096);
  EXPECT_EQ(trace.json(), R"json({"displayTimeUnit":"ns",
"otherData":{"clock":"CLOCK_MONOTONIC","dropped_events":0},
"traceEvents":[
{"ph":"M","name":"process_name","pid":41,"args":{"name":"prefill rank 3"}},
{"ph":"C","name":"in flight","pid":41,"ts":4000000.0,"args":{"bytes":4096}},
{"ph":"X","name":"layer","cat":"engine","pid":41,"tid":1,"ts":1000001.5,"dur":2.5,"args":{"layer":5}},
{"ph":"M","name":"thread_name","pid":41,"tid":1,"args":{"name":"layer compute"}},
{"ph":"M","name":"thread_sort_index","pid":41,"tid":1,"args":{"sort_index":1}},
{"ph":"X","name":"post","cat":"session","pid":41,"tid":2,"ts":2000000.0,"dur":1000.0,"args":{"transfer":"req-7#2","layer":5,"tokens":"[0, 16)","bytes":4096}},
{"ph":"i","name":"granted","cat":"session","pid":41,"tid":2,"ts":3000000.0,"s":"t","args":{"transfer":"req-7#2"}},
{"ph":"M","name":"thread_name","pid":41,"tid":2,"args":{"name":"to decode rank 1"}},
{"ph":"M","name":"thread_sort_index","pid":41,"tid":2,"args":{"sort_index":2}}
]}
)json");
  EXPECT_TRUE(holds(check_file(read(trace.json()))));
}

TEST(Trace, KeepsNanosecondsAfterAHundredDays) {
  Trace trace("p", 1);
  const Instant begin = 24h * 100 + 123'456'789ns;
  trace.span(trace.track("t"), "c", "n", begin, begin + 1ns);
  const auto spans = of_kind(read(trace.json()), "X");
  ASSERT_EQ(spans.size(), 1u);
  EXPECT_EQ(nanos(spans[0]["ts"]), begin.count());
  EXPECT_EQ(nanos(spans[0]["dur"]), 1);
}

TEST(Trace, ATrackIsTheSameEachTime) {
  Trace trace("p", 1);
  const TrackId a = trace.track("a"), b = trace.track("b");
  EXPECT_NE(a, b);
  EXPECT_EQ(trace.track("a"), a);
  EXPECT_EQ(trace.track("b"), b);
}

TEST(Trace, ASpanThatEndsBeforeItBeginsTakesNoTime) {
  Trace trace("p", 1);
  trace.span(trace.track("t"), "c", "n", 5us, 3us);
  EXPECT_EQ(of_kind(read(trace.json()), "X").at(0)["dur"], 0);
}

TEST(Trace, DrawsSpansThatCrossOnSeveralLines) {
  Trace trace("prefill rank 0", 1);
  const TrackId posts = trace.track("posts"), other = trace.track("other");
  trace.span(posts, "c", "crosses", 3us, 7us);
  trace.span(posts, "c", "outer", 1us, 5us);
  trace.span(posts, "c", "inner", 2us, 3us);
  trace.span(posts, "c", "after", 5us, 6us);
  trace.span(other, "c", "elsewhere", 4us, 9us);
  const json file = read(trace.json());
  EXPECT_TRUE(holds(check_file(file)));
  EXPECT_THAT(names(file), ElementsAre("1: prefill rank 0", "1.1: posts", "1.2: posts (2)", "1.3: other"));
  std::map<std::string, int> tids;
  for (const json& span : of_kind(file, "X")) tids[span["name"]] = span["tid"];
  EXPECT_EQ(tids, (std::map<std::string, int>{{"outer", 1}, {"inner", 1}, {"after", 1}, {"crosses", 2}, {"elsewhere", 3}}));
}

RC_GTEST_PROP(Trace, EveryEventIsInTheFileOrDropped, ()) {
  const auto most = *rc::gen::inRange<std::size_t>(0, 60);
  Trace trace("p", 7, most);
  const std::array tracks = {trace.track("a"), trace.track("b")};
  const int told = *rc::gen::inRange(0, 80);
  for (int i = 0; i < told; ++i) {
    const TrackId track = tracks.at(*rc::gen::inRange<std::size_t>(0, 2));
    const Instant begin = *rc::gen::inRange(0, 40) * 1us, end = begin + *rc::gen::inRange(0, 20) * 1us;
    switch (*rc::gen::inRange(0, 3)) {
      case 0: trace.span(track, "c", "n", begin, end); break;
      case 1: trace.instant(track, "c", "n", begin, {.bytes = Bytes(i)}); break;
      default: trace.counter("n", "u", begin, i); break;
    }
  }
  const json file = read(trace.json());
  if (const auto law = check_file(file); !law) RC_FAIL(law.error().message);
  RC_ASSERT(trace.events() <= most);
  RC_ASSERT(trace.events() + trace.dropped() == static_cast<std::size_t>(told));
  RC_ASSERT(of_kind(file, "X").size() + of_kind(file, "i").size() + of_kind(file, "C").size() == trace.events());
  RC_ASSERT(file["otherData"]["dropped_events"] == trace.dropped());
}

TEST(Trace, SaysInThePictureThatEventsWereDropped) {
  Trace trace("p", 7, 1);
  const TrackId track = trace.track("t");
  for (int i = 0; i < 4; ++i) trace.instant(track, "c", "n", Instant(i));
  EXPECT_THAT(
      trace.json(),
      testing::HasSubstr(R"({"ph":"M","name":"process_labels","pid":7,"args":{"labels":"the last 3 events were dropped"}})"));
}

// Names are a peer's words; the file stays JSON, and UTF-8.
TEST(Trace, NamesMayBeAnything) {
  const std::string evil = "a\"b\\c\n\x01</script>\xff\xc3";
  Trace trace(evil, 1);
  trace.instant(trace.track(evil), "c", "n", 1us, {.transfer = named(evil)});
  const json file = read(trace.json());
  EXPECT_TRUE(holds(check_file(file)));
  EXPECT_THAT(names(file), ElementsAre("1: a\"b\\c\n\x01</script>\xef\xbf\xbd\xef\xbf\xbd",
                                       "1.1: a\"b\\c\n\x01</script>\xef\xbf\xbd\xef\xbf\xbd"));
  EXPECT_EQ(of_kind(file, "i").at(0)["args"]["transfer"], "a\\x22b\\x5cc\\x0a\\x01</script>\xef\xbf\xbd\xef\xbf\xbd#2");
}

TEST(Trace, TakesEventsOfManyThreads) {
  Trace trace("p", 1, 3000);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&trace, t] {
      const TrackId track = trace.track(fmt::format("thread {}", t % 2));
      for (int i = 0; i < 1000; ++i) trace.span(track, "c", "n", Instant(i), Instant(i + 1), {.transfer = named()});
    });
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(holds(check_file(read(trace.json()))));
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(trace.events(), 3000u);
  EXPECT_EQ(trace.dropped(), 1000u);
}

// ---- merged files ----

std::string part(const char* process, std::int64_t pid, int events = 1) {
  Trace trace(process, pid, 2);
  const TrackId track = trace.track("t");
  for (int i = 0; i < events; ++i) trace.instant(track, "c", "n", 1us);
  return trace.json();
}

TEST(Trace, AMergedFileKeepsProcessesApart) {
  const auto merged = merge_traces(std::vector{part("prefill rank 0", 40), part("prefill rank 1", 41, 5),
                                               part("decode rank 0", 40, 3), part("decode rank 1", 1)});
  ASSERT_TRUE(merged) << merged.error().message;
  const json file = read(*merged);
  EXPECT_TRUE(holds(check_file(file)));
  EXPECT_THAT(names(file), ElementsAre("40: prefill rank 0", "40.1: t", "41: prefill rank 1", "41.1: t", "1: decode rank 0",
                                       "1.1: t", "2: decode rank 1", "2.1: t"));
  EXPECT_EQ(file["otherData"]["dropped_events"], 3 + 1);
  std::map<std::int64_t, int> events;
  for (const json& event : of_kind(file, "i")) ++events[event["pid"]];
  EXPECT_EQ(events, (std::map<std::int64_t, int>{{40, 1}, {41, 2}, {1, 2}, {2, 1}}));
}

TEST(Trace, MergedFilesMerge) {
  const std::string two = merge_traces(std::vector{part("a", 1), part("b", 2)}).value();
  EXPECT_EQ(merge_traces(std::vector{two}), two);
  const auto four = merge_traces(std::vector{two, two});
  ASSERT_TRUE(four);
  EXPECT_THAT(names(read(*four)), ElementsAre("1: a", "1.1: t", "2: b", "2.1: t", "3: a", "3.1: t", "4: b", "4.1: t"));
  const auto none = merge_traces({});
  ASSERT_TRUE(none);
  EXPECT_TRUE(holds(check_file(read(*none))));
}

TEST(Trace, MergingSaysWhichPartIsNotATrace) {
  const auto second = [](std::string text) { return merge_traces(std::vector{part("a", 1), std::move(text)}); };
  EXPECT_TRUE(says(second(""), "part 1 is not a trace: it is not JSON"));
  EXPECT_TRUE(says(second(part("b", 2).substr(1)), "part 1 is not a trace: it is not JSON"));
  EXPECT_TRUE(says(second("[]"), "part 1 is not a trace: no list of traceEvents"));
  EXPECT_TRUE(says(second(R"({"traceEvents":{}})"), "part 1 is not a trace: no list of traceEvents"));
  EXPECT_TRUE(says(second(R"({"traceEvents":[7]})"), "part 1 is not a trace: event 0 has no ph or no pid"));
  EXPECT_TRUE(says(second(R"({"traceEvents":[{"ph":"i","pid":1},{"ph":"i","pid":"x"}]})"), "event 1 has no ph or no pid"));
  EXPECT_TRUE(says(second(R"({"traceEvents":[{"ph":"i","pid":-1}]})"), "event 0 has pid -1, outside of [0, 2^31)"));
  EXPECT_TRUE(says(second(R"({"traceEvents":[{"ph":"i","pid":18446744073709551615}]})"), "outside of [0, 2^31)"));
}

}  // namespace
}  // namespace kvloom
