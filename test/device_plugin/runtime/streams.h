// Streams, which do their work in order in a thread of their own, events, and links of a limited speed.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace test_device {

// A point in a stream's work that is reached once.
class Ticket {
 public:
  void finish() {
    std::lock_guard lock(mutex_);
    finished_ = true;
    changed_.notify_all();
  }

  bool finished() const {
    std::lock_guard lock(mutex_);
    return finished_;
  }

  void wait() const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return finished_; });
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool finished_ = false;
};

// While it is closed, no stream begins another piece of work.
class Gate {
 public:
  void set(bool open) {
    std::lock_guard lock(mutex_);
    open_ = open;
    changed_.notify_all();
  }

  void pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
};

using Clock = std::chrono::steady_clock;

// What bytes move over, one transfer after the other, each as slowly as the speed says.
class Link {
 public:
  // Bytes per second; 0 for no limit.
  void set_speed(double speed) {
    std::lock_guard lock(mutex_);
    speed_ = speed;
    free_from_ = Clock::now();
  }

  // Returns when the last of so many bytes would have arrived, if the first could be sent at `ready`; and when that is.
  Clock::time_point carry(size_t bytes, Clock::time_point ready = Clock::now()) {
    Clock::time_point arrival;
    {
      std::lock_guard lock(mutex_);
      if (speed_ <= 0) return Clock::now();
      const auto seconds = std::chrono::duration<double>(static_cast<double>(bytes) / speed_);
      free_from_ = std::max(free_from_, ready) + std::chrono::duration_cast<Clock::duration>(seconds);
      arrival = free_from_;
    }
    std::this_thread::sleep_until(arrival);
    return arrival;
  }

 private:
  std::mutex mutex_;
  double speed_ = 0;
  Clock::time_point free_from_;
};

// In the thread of a stream: since when its next piece of work could have begun. A device moves bytes by itself; here
// the thread does, which must not keep the link from carrying the next copy's bytes meanwhile. So a copy says that it
// ended when its bytes had arrived.
inline thread_local Clock::time_point stream_ready;
inline thread_local bool stream_ready_is_told;

// Work is begun in the order in which it was submitted, each piece after the one before has ended. The thread outlives
// the Stream until all is done, as a destroyed CUDA stream's work does.
class Stream {
 public:
  explicit Stream(Gate& gate) : queue_(std::make_shared<Queue>()) {
    std::thread([queue = queue_, &gate] { queue->serve(gate); }).detach();
  }

  ~Stream() {
    submit(nullptr);
  }

  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  std::atomic<bool> ran_collectives{false};

  void submit(std::function<void()> work) {
    std::lock_guard lock(queue_->mutex);
    queue_->work.push_back(std::move(work));
    queue_->changed.notify_all();
  }

  // Returns a ticket that finishes when all the work submitted so far is done.
  std::shared_ptr<Ticket> mark() {
    auto ticket = std::make_shared<Ticket>();
    submit([ticket] {
      ticket->finish();
      stream_ready_is_told = true;  // it takes no time
    });
    return ticket;
  }

  bool idle() const {
    std::lock_guard lock(queue_->mutex);
    return queue_->work.empty();
  }

  void synchronize() const {
    std::unique_lock lock(queue_->mutex);
    queue_->changed.wait(lock, [this] { return queue_->work.empty(); });
  }

 private:
  struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> work;  // the first is under way, or waits at the gate

    void serve(Gate& gate) {
      for (;;) {
        std::function<void()> next;
        {
          std::unique_lock lock(mutex);
          if (work.empty()) {
            changed.wait(lock, [this] { return !work.empty(); });
            stream_ready = Clock::now();
          }
          next = work.front();
        }
        if (!next) return;
        gate.pass();
        stream_ready_is_told = false;
        next();
        if (!stream_ready_is_told) stream_ready = Clock::now();
        next = nullptr;
        std::lock_guard lock(mutex);
        work.pop_front();
        changed.notify_all();
      }
    }
  };

  std::shared_ptr<Queue> queue_;
};

// An event that was never recorded counts as reached.
class Event {
 public:
  void record(Stream& stream) { set(stream.mark()); }

  bool reached() const {
    const auto ticket = get();
    return !ticket || ticket->finished();
  }

  void wait() const {
    if (const auto ticket = get()) ticket->wait();
  }

  // Let later work of a stream wait for the point that was recorded last.
  void hold_back(Stream& stream) const {
    if (const auto ticket = get()) {
      stream.submit([ticket] { ticket->wait(); });
    }
  }

 private:
  void set(std::shared_ptr<Ticket> ticket) {
    std::lock_guard lock(mutex_);
    ticket_ = std::move(ticket);
  }

  std::shared_ptr<Ticket> get() const {
    std::lock_guard lock(mutex_);
    return ticket_;
  }

  mutable std::mutex mutex_;
  std::shared_ptr<Ticket> ticket_;
};

}  // namespace test_device
