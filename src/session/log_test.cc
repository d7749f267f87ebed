#include "kvloom/session/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <memory>
#include <thread>

#include "kvloom/session/message.h"

namespace kvloom {
namespace {

using namespace std::chrono_literals;
using testing::MatchesRegex;

std::chrono::system_clock::time_point at(std::chrono::milliseconds since_1970) {
  return std::chrono::system_clock::time_point(since_1970);
}

struct Close {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, Close>;

std::vector<std::string> lines_of(std::FILE* file) {
  std::rewind(file);
  std::string text;
  for (int c = 0; (c = std::fgetc(file)) != EOF;) text += static_cast<char>(c);
  std::vector<std::string> out;
  for (std::size_t end = 0; (end = text.find('\n')) != std::string::npos; text.erase(0, end + 1))
    out.push_back(text.substr(0, end));
  EXPECT_EQ(text, "") << "a line without an end";
  return out;
}

TEST(Log, ALineSaysWhenWhoHowBadAndWhat) {
  EXPECT_EQ(log_line(at(1'772'366'693'007ms), "prefill 3", LogLevel::warning, "transfer req-7#2: decode rank 1 is gone"),
            "2026-03-01T12:04:53.007Z kvloom[prefill 3] warning transfer req-7#2: decode rank 1 is gone\n");
  EXPECT_EQ(log_line(at(-1ms), "decode 0", LogLevel::error, ""), "1969-12-31T23:59:59.999Z kvloom[decode 0] error \n");
}

TEST(Log, AMessageReadsAsItPrints) {
  const std::string cancel = to_string(Message(Cancel{{"a\nb", Epoch(1)}, Rank(2), "said \"no\""}));
  EXPECT_EQ(cancel, "cancel a\\x0ab#1 target=2 reason=\"said \\x22no\\x22\"");
  EXPECT_EQ(log_line(at(0ms), "decode 2", LogLevel::debug, cancel),
            "1970-01-01T00:00:00.000Z kvloom[decode 2] debug " + cancel + "\n");
}

RC_GTEST_PROP(Log, ALineStaysOneLineWhateverTheWords, (const std::string& who, const std::string& words)) {
  const std::string line = log_line(at(0ms), who, LogLevel::info, words);
  RC_ASSERT(line.ends_with('\n'));
  for (const char c : std::string_view(line).substr(0, line.size() - 1))
    RC_ASSERT(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f);
}

TEST(Log, AFileGetsWhatIsBadEnough) {
  const File file(std::tmpfile());
  const LogSink log = file_log(file.get(), "prefill 0", LogLevel::warning);
  log(LogLevel::info, "one");
  log(LogLevel::warning, "two");
  log(LogLevel::error, "three");
  const auto lines = lines_of(file.get());
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_THAT(lines[0], MatchesRegex(R"(20..-..-..T..:..:..\....Z kvloom\[prefill 0\] warning two)"));
  EXPECT_THAT(lines[1], MatchesRegex(".*error three"));
}

TEST(Log, LinesOfSeveralThreadsDoNotMix) {
  const File file(std::tmpfile());
  const LogSink log = file_log(file.get(), "prefill 0");
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&log, t] {
      for (int i = 0; i < 200; ++i) log(LogLevel::info, std::string(100, static_cast<char>('a' + t)));
    });
  for (std::thread& thread : threads) thread.join();
  const auto lines = lines_of(file.get());
  EXPECT_EQ(lines.size(), 800u);
  for (const std::string& line : lines) EXPECT_THAT(line, MatchesRegex(".* info (a+|b+|c+|d+)"));
}

TEST(Log, LevelsHaveNames) {
  EXPECT_STREQ(to_string(LogLevel::debug), "debug");
  EXPECT_STREQ(to_string(LogLevel::info), "info");
}

}  // namespace
}  // namespace kvloom
