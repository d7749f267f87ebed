// loans.h: cudaMalloc'ed memory of this process that another transport of this process reads where it lies.  Stage: carry.
// Between processes a reader has the memory mapped, and with that held. An IPC handle can't be opened where it was made, so within a
// process the reader has nothing but the address: memory that its owner takes back and frees would be a fault, which ends the context.
// Law: once a loan has ended no copy reads it, and none begins to. `end` begins what the reader had listed, waits for the copies that are under way
// and for nothing else: not for the reader's thread. What still would read it costs the reader that connection.
// Owner: Contexts.  Thread: any: source and target have threads of their own.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>

#include "kvloom/transport/shm/copy_work.h"

namespace kvloom::cuda {

class Loans {
 public:
  class Loan : public std::enable_shared_from_this<Loan> {
   public:
    Loan(Loans& loans, CUdeviceptr address, std::size_t bytes) : loans_(loans), address_(address), bytes_(bytes) {}
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;
    ~Loan() { end(); }

    void end() { loans_.end(*this); }
    bool ended() const { return ended_.load(); }

   private:
    friend class Loans;
    Loans& loans_;
    const CUdeviceptr address_;
    const std::size_t bytes_;
    std::atomic<bool> ended_ = false;
    int readers_ = 0;
  };
  // What a reader has of it.
  class Borrowed {
   public:
    Borrowed(Loans& loans, std::shared_ptr<Loan> loan) : loans_(loans), loan_(std::move(loan)) {}
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;
    ~Borrowed() { loans_.give_up(*loan_); }
    bool ended() const { return loan_->ended(); }

   private:
    Loans& loans_;
    std::shared_ptr<Loan> loan_;  // owners: the lender, and those who read
  };
  // A queue of copies: whatever may begin one is called with `reading` held.
  class Reader {
   public:
    virtual ~Reader() = default;
    virtual void drain_for_lender() = 0;
  };

  Loans() = default;
  Loans(const Loans&) = delete;
  Loans& operator=(const Loans&) = delete;

  std::shared_ptr<Loan> lend(CUdeviceptr address, std::size_t bytes);
  // Null: nothing is lent there, of this length.
  std::unique_ptr<Borrowed> borrow(CUdeviceptr address, std::size_t bytes);

  void add(Reader& reader);
  void remove(Reader& reader);
  std::shared_lock<std::shared_mutex> reading() { return std::shared_lock(mutex_); }
  // Whether all of them may read where they read.  @pre reading is held    @cost a load, if no loan has ended that is still borrowed
  bool may_read(const shm::CopyWork& work) const;

 private:
  void end(Loan& loan);
  void give_up(Loan& loan);
  bool is_lent(CUdeviceptr address, std::size_t bytes) const;

  mutable std::shared_mutex mutex_;
  std::multimap<CUdeviceptr, Loan*> lent_;         // by address: those that have not ended
  std::multimap<CUdeviceptr, std::size_t> ended_;  // by address, bytes: borrowed still
  std::atomic<std::size_t> ended_count_ = 0;
  std::set<Reader*> readers_;
};

}  // namespace kvloom::cuda
