// metrics.h: what one rank has done, counted, as Prometheus text.  Stage: stream.  A resource; nothing here decides anything.
// Names begin with kvloom_, are in seconds and bytes, and carry the labels side ("prefill", "decode") and rank. Every series is
// there from the start, at 0: a rate over one that appears with its first failure would miss that failure.
// The library that counts (prometheus-cpp, core) stays behind this header.
// Thread: any; whoever scrapes reads while the rank's own thread counts.  Time: passed in, as durations.
// @cost of each method but text(): a few atomic additions, for a histogram under a lock that text() takes too. No allocation.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "kvloom/base/error.h"
#include "kvloom/base/units.h"
#include "kvloom/session/session.h"

namespace kvloom {

// Upper bounds of the buckets of histograms; a value goes into the first bucket that is not below it.

// Of one post, seconds: 64 MiB take 170 us at 400 GB/s (NVLink) and 60 ms at 1 GB/s; from 1 s (SessionLimits::grace) on it hangs.
inline constexpr std::array kPostSeconds = {1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3,
                                            5e-3, 1e-2,   2e-2, 5e-2, 1e-1,   2e-1, 0.5,  1.0};
// Of the tail that a request waits for, seconds: fine where it is part of a decode step (10 to 50 ms), or not seen at all.
inline constexpr std::array kTailSeconds = {1e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 3e-2,
                                            5e-2, 7.5e-2, 0.1,  0.2,  0.5,  1.0,  2.0,  5.0,  10.0};
// Of a transfer and of a quarantine, seconds: as long as prefill computes (tenths to minutes), or a peer takes to be seen dead.
inline constexpr std::array kTransferSeconds = {5e-3, 1e-2, 2.5e-2, 5e-2, 0.1,  0.25, 0.5,   1.0,
                                                2.5,  5.0,  10.0,   30.0, 60.0, 120., 300.0, 600.0};
// Of a quarantine, pages: powers of four up to 1M tokens of 16 a page.
inline constexpr std::array kQuarantinePages = {1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0};

class Metrics {
 public:
  using Time = std::chrono::nanoseconds;

  // `side`: "prefill" or "decode".
  Metrics(std::string_view side, Rank rank);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // ---- transfers ----
  void opened();
  void ended(Outcome outcome, Code why, Time since_opened);  // `why` is counted where it has failed; the time where it has landed
  void granted();                                            // a grant was sent, or taken
  void exposed_tail(Time from_last_ready_to_landed);

  // ---- a source's posts ----
  void queued(Time in_pacer);       // gone to the transport after so long
  void ready_to_post(Time waited);  // from the transfer's last `ready` until its write
  void posted(Bytes bytes, std::int64_t runs, std::int64_t parts);
  void delivered(Bytes bytes, Time from_write_to_completed);
  void undelivered(Code why);

  // ---- a target's memory ----
  void landed(Bytes bytes);
  void quarantined(std::int64_t pages);             // a transfer's pages may not be used again yet
  void freed(std::int64_t pages, Time quarantine);  // @pre they were told as quarantined

  // ---- what is said ----
  void notice_sent();
  void notice_received();
  void control_sent();
  void control_received();

  // ---- partners ----
  void partner_up();
  void partner_lost(Code why);  // @pre it was up
  void hello_refused(Code why);
  void geometry_refused(Code why);

  // All of it in the text format of Prometheus, version 0.0.4.
  std::string text() const;

 private:
  struct Series;
  std::unique_ptr<Series> series_;
};

}  // namespace kvloom
