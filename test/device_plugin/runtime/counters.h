// What the runtime was asked to do, by the name of the call, for tests to look at; and what it leaves out.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace test_device {

class Counters {
 public:
  void add(const std::string& name, uint64_t bytes = 0) {
    std::lock_guard lock(mutex_);
    Count& count = counts_[name];
    count.calls += 1;
    count.bytes += bytes;
  }

  void reset() {
    std::lock_guard lock(mutex_);
    counts_.clear();
  }

  // {"name": [calls, bytes], ...}
  std::string json() const {
    std::lock_guard lock(mutex_);
    std::string text;
    for (const auto& [name, count] : counts_) {
      text += (text.empty() ? "\"" : ", \"") + name + "\": [" + std::to_string(count.calls) + ", " +
              std::to_string(count.bytes) + "]";
    }
    return "{" + text + "}";
  }

 private:
  struct Count {
    uint64_t calls = 0, bytes = 0;
  };
  mutable std::mutex mutex_;
  std::map<std::string, Count> counts_;
};

// The collectives that only say that they have succeeded.
class Lies {
 public:
  void set(const std::string& names) {
    std::lock_guard lock(mutex_);
    names_ = names;
  }

  bool about(const std::string& name) const {
    std::lock_guard lock(mutex_);
    return names_.find(" " + name + " ") != std::string::npos;
  }

 private:
  mutable std::mutex mutex_;
  std::string names_;
};

}  // namespace test_device
