// A device that Paddle loads as a plugin: it has memory, streams, events, copies and collectives, and no kernels but
// those that only move bytes.
// Here is what Paddle calls (InitPlugin, at the end) and what tests call through ctypes (the test_device_ functions).

#include <unistd.h>

#include <random>

#include "collectives.h"
#include "device.h"
#include "kernels.h"

using namespace test_device;

namespace {

thread_local int current_device = 0;

Runtime& runtime() { return Runtime::get(); }
Device& at(const C_Device device) { return *runtime().devices.at(device->id); }
Stream& as_stream(C_Stream stream) { return *reinterpret_cast<Stream*>(stream); }
Event& as_event(C_Event event) { return *reinterpret_cast<Event*>(event); }
void count(const char* name, size_t bytes = 0) { runtime().counters.add(name, bytes); }

// ---- devices

C_Status init_device(const C_Device) { return C_SUCCESS; }

C_Status set_device(const C_Device device) {
  current_device = device->id;
  return C_SUCCESS;
}

C_Status get_device(const C_Device device) {
  device->id = current_device;
  return C_SUCCESS;
}

C_Status synchronize_device(const C_Device device) {
  count("synchronize_device");
  at(device).synchronize();
  return C_SUCCESS;
}

C_Status get_device_count(size_t* result) {
  *result = runtime().devices.size();
  return C_SUCCESS;
}

C_Status get_device_list(size_t* devices) {
  for (size_t i = 0; i < runtime().devices.size(); ++i) devices[i] = i;
  return C_SUCCESS;
}

C_Status device_memory_stats(const C_Device device, size_t* total, size_t* free) {
  *total = at(device).arena.capacity();
  *free = *total - at(device).arena.bytes();
  return C_SUCCESS;
}

C_Status device_min_chunk_size(const C_Device, size_t* size) {
  *size = 256;
  return C_SUCCESS;
}

// ---- streams and events

C_Status create_stream(const C_Device device, C_Stream* stream) {
  count("create_stream");
  auto* made = new Stream(runtime().gate);
  std::lock_guard lock(at(device).mutex);
  at(device).streams.insert(made);
  *stream = reinterpret_cast<C_Stream>(made);
  return C_SUCCESS;
}

C_Status destroy_stream(const C_Device device, C_Stream stream) {
  {
    std::lock_guard lock(at(device).mutex);
    at(device).streams.erase(&as_stream(stream));
  }
  delete &as_stream(stream);
  return C_SUCCESS;
}

C_Status query_stream(const C_Device, C_Stream stream) {
  count("query_stream");
  return as_stream(stream).idle() ? C_SUCCESS : C_FAILED;
}

C_Status synchronize_stream(const C_Device, C_Stream stream) {
  count("synchronize_stream");
  as_stream(stream).synchronize();
  return C_SUCCESS;
}

C_Status stream_add_callback(const C_Device device, C_Stream stream, C_Callback callback, void* user_data) {
  count("stream_add_callback");
  as_stream(stream).submit([device, stream, callback, user_data] {
    C_Status status = C_SUCCESS;
    callback(device, stream, user_data, &status);
  });
  return C_SUCCESS;
}

C_Status create_event(const C_Device, C_Event* event) {
  *event = reinterpret_cast<C_Event>(new Event);
  return C_SUCCESS;
}

C_Status destroy_event(const C_Device, C_Event event) {
  delete &as_event(event);
  return C_SUCCESS;
}

C_Status record_event(const C_Device, C_Stream stream, C_Event event) {
  count("record_event");
  as_event(event).record(as_stream(stream));
  return C_SUCCESS;
}

C_Status query_event(const C_Device, C_Event event) {
  count("query_event");
  return as_event(event).reached() ? C_SUCCESS : C_FAILED;
}

C_Status synchronize_event(const C_Device, C_Event event) {
  count("synchronize_event");
  as_event(event).wait();
  return C_SUCCESS;
}

C_Status stream_wait_event(const C_Device, C_Stream stream, C_Event event) {
  count("stream_wait_event");
  as_event(event).hold_back(as_stream(stream));
  return C_SUCCESS;
}

// ---- memory

C_Status device_memory_allocate(const C_Device device, void** address, size_t size) {
  *address = at(device).arena.allocate(size);
  if (!*address) return C_FAILED;
  count("device_memory_allocate", size);
  return C_SUCCESS;
}

// Waits for all work on the device, as cudaFree does.
C_Status device_memory_deallocate(const C_Device device, void* address, size_t size) {
  count("device_memory_deallocate", size);
  at(device).synchronize();
  return at(device).arena.release(address) ? C_SUCCESS : refuse("no such memory to free");
}

C_Status device_memory_set(const C_Device, void* address, unsigned char value, size_t size) {
  count("device_memory_set", size);
  std::byte* own = runtime().own(address, size);
  if (!own) return refuse("device_memory_set: not device memory");
  std::memset(own, value, size);
  return C_SUCCESS;
}

C_Status host_memory_allocate(const C_Device, void** address, size_t size) {
  count("host_memory_allocate", size);
  *address = std::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  if (*address) runtime().pinned.add(*address, size);
  return *address ? C_SUCCESS : C_FAILED;
}

C_Status host_memory_deallocate(const C_Device, void* address, size_t size) {
  count("host_memory_deallocate", size);
  if (!runtime().pinned.remove(address)) return refuse("no such pinned memory to free");
  std::free(address);
  return C_SUCCESS;
}

// ---- copies

C_Status memory_copy_h2d(const C_Device, void* to, const void* from, size_t size) {
  return runtime().copy_now("memory_copy_h2d", kHostToDevice, to, from, size);
}

C_Status memory_copy_d2h(const C_Device, void* to, const void* from, size_t size) {
  return runtime().copy_now("memory_copy_d2h", kDeviceToHost, to, from, size);
}

C_Status memory_copy_d2d(const C_Device, void* to, const void* from, size_t size) {
  return runtime().copy_now("memory_copy_d2d", kDeviceToDevice, to, from, size);
}

C_Status memory_copy_p2p(const C_Device, const C_Device, void* to, const void* from, size_t size) {
  return runtime().copy_now("memory_copy_p2p", kDeviceToDevice, to, from, size);
}

C_Status async_copy_h2d(const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
  return runtime().copy_later("async_memory_copy_h2d", kHostToDevice, as_stream(stream), to, from, size);
}

C_Status async_copy_d2h(const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
  return runtime().copy_later("async_memory_copy_d2h", kDeviceToHost, as_stream(stream), to, from, size);
}

C_Status async_copy_d2d(const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
  return runtime().copy_later("async_memory_copy_d2d", kDeviceToDevice, as_stream(stream), to, from, size);
}

C_Status async_copy_p2p(const C_Device, const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
  return runtime().copy_later("async_memory_copy_p2p", kDeviceToDevice, as_stream(stream), to, from, size);
}

// ---- collectives

using Group = std::shared_ptr<Communicator>;
constexpr size_t kNameSize = 64;

Group as_group(C_CCLComm comm) { return *reinterpret_cast<Group*>(comm); }

// Sends and receives between group_start and group_end of this thread, which then run at the same time.
struct Batch {
  int depth = 0;
  std::map<Group, std::vector<Transfer>> transfers;
  std::vector<Stream*> streams;
};
thread_local Batch batch;

C_Status xccl_get_unique_id_size(size_t* size) {
  *size = kNameSize;
  return C_SUCCESS;
}

C_Status xccl_get_unique_id(C_CCLRootId* id) {
  std::random_device random;
  std::snprintf(static_cast<char*>(id->data), kNameSize, "/test-device-%d-%08x%08x", getpid(), random(), random());
  return C_SUCCESS;
}

C_Status xccl_comm_init_rank(size_t ranks, C_CCLRootId* id, size_t rank, C_CCLComm* comm) {
  count("xccl_comm_init_rank");
  auto group = std::make_shared<Communicator>(static_cast<const char*>(id->data), rank, ranks);
  *comm = reinterpret_cast<C_CCLComm>(new Group(std::move(group)));
  return C_SUCCESS;
}

C_Status xccl_destroy_comm(C_CCLComm comm) {
  delete reinterpret_cast<Group*>(comm);
  return C_SUCCESS;
}

// Queues `work(group)`. A null buffer among those given, as Runtime::own returns it for a wrong address, is refused.
template <typename Work>
C_Status collective(const char* name, C_CCLComm comm, C_Stream stream, size_t bytes,
                    std::initializer_list<const std::byte*> buffers, Work work) {
  if (std::count(buffers.begin(), buffers.end(), nullptr)) return refuse(name + std::string(": not device memory"));
  count(name, bytes);
  const Group group = as_group(comm);
  if (runtime().lies.about(name)) return C_SUCCESS;
  Communicator::submit(as_stream(stream), {group}, [name, group, bytes, work] {
    runtime().network.carry(bytes);
    work(Collective(*group, name));
  });
  return C_SUCCESS;
}

// Where the parts of the ranks begin in `count` elements, and where the last ends.
std::vector<size_t> even_parts(size_t count, size_t ranks) {
  std::vector<size_t> bounds;
  for (size_t rank = 0; rank <= ranks; ++rank) bounds.push_back(count * rank / ranks);
  return bounds;
}

C_Status xccl_broadcast(void* memory, size_t n, C_DataType type, size_t root, C_CCLComm comm, C_Stream stream) {
  const size_t bytes = n * size_of(type);
  std::byte* own = runtime().own(memory, bytes);
  return collective("broadcast", comm, stream, bytes, {own},
                    [=](const Collective& all) { all.broadcast(own, bytes, root); });
}

C_Status xccl_all_reduce(void* send, void* receive, size_t n, C_DataType type, C_CCLReduceOp op, C_CCLComm comm,
                         C_Stream stream) {
  if (!can_reduce(type, op)) return refuse("all_reduce: not for this type");
  const size_t item = size_of(type);
  const std::byte* in = runtime().own(send, n * item);
  std::byte* out = runtime().own(receive, n * item);
  const auto bounds = even_parts(n, as_group(comm)->size);
  const size_t mine = bounds[as_group(comm)->rank] * item;
  return collective("all_reduce", comm, stream, n * item, {in, out}, [=](const Collective& all) {
    all.reduce_parts(in, out + mine, bounds, type, op);
    all.gather_parts(out + mine, out, bounds, item);
  });
}

C_Status xccl_reduce(void* send, void* receive, size_t n, C_DataType type, C_CCLReduceOp op, size_t root,
                     C_CCLComm comm, C_Stream stream) {
  if (!can_reduce(type, op)) return refuse("reduce: not for this type");
  const size_t bytes = n * size_of(type);
  const std::byte* in = runtime().own(send, bytes);
  std::byte* out = runtime().own(receive, bytes);  // of use on the root only
  std::vector<size_t> bounds(as_group(comm)->size + 1, 0);  // all is the root's part
  std::fill(bounds.begin() + root + 1, bounds.end(), n);
  return collective("reduce", comm, stream, bytes, {in},
                    [=](const Collective& all) { all.reduce_parts(in, out, bounds, type, op); });
}

C_Status xccl_all_gather(void* send, void* receive, size_t n, C_DataType type, C_CCLComm comm, C_Stream stream) {
  const size_t item = size_of(type), ranks = as_group(comm)->size;
  const std::byte* in = runtime().own(send, n * item);
  std::byte* out = runtime().own(receive, n * item * ranks);
  return collective("all_gather", comm, stream, n * item, {in, out}, [=](const Collective& all) {
    all.gather_parts(in, out, even_parts(n * ranks, ranks), item);
  });
}

C_Status xccl_reduce_scatter(void* send, void* receive, size_t n, C_DataType type, C_CCLReduceOp op, C_CCLComm comm,
                             C_Stream stream) {
  if (!can_reduce(type, op)) return refuse("reduce_scatter: not for this type");
  const size_t item = size_of(type), ranks = as_group(comm)->size;
  const std::byte* in = runtime().own(send, n * item * ranks);
  std::byte* out = runtime().own(receive, n * item);
  return collective("reduce_scatter", comm, stream, n * item * ranks, {in, out}, [=](const Collective& all) {
    all.reduce_parts(in, out, even_parts(n * ranks, ranks), type, op);
  });
}

C_Status xccl_all_to_all(const void** send, const size_t* send_counts, const C_DataType* send_types, void** receive,
                         const size_t* receive_counts, const C_DataType* receive_types, size_t, size_t ranks,
                         C_CCLComm comm, C_Stream stream) {
  std::vector<const std::byte*> outs;
  std::vector<std::byte*> ins;
  std::vector<size_t> sizes_out, sizes_in;
  size_t bytes = 0;
  for (size_t rank = 0; rank < ranks; ++rank) {
    sizes_out.push_back(send_counts[rank] * size_of(send_types[rank]));
    sizes_in.push_back(receive_counts[rank] * size_of(receive_types[rank]));
    outs.push_back(runtime().own(send[rank], sizes_out[rank]));
    ins.push_back(runtime().own(receive[rank], sizes_in[rank]));
    if (!outs[rank] || !ins[rank]) return refuse("all_to_all: not device memory");
    bytes += sizes_out[rank];
  }
  const size_t self = as_group(comm)->rank;
  if (sizes_out[self] != sizes_in[self]) return refuse("all_to_all: a rank gets another size from itself than it sends");
  return collective("all_to_all", comm, stream, bytes, {},
                    [=](const Collective& all) { all.all_to_all(outs, sizes_out, ins, sizes_in); });
}

C_Status xccl_group_start() {
  batch.depth += 1;
  return C_SUCCESS;
}

// What was gathered runs on the first stream; any others wait for it, and it for them.
C_Status xccl_group_end() {
  if (batch.depth == 0) return refuse("group_end without group_start");
  if (--batch.depth > 0) return C_SUCCESS;
  const Batch whole = std::exchange(batch, {});
  if (whole.transfers.empty()) return C_SUCCESS;
  Stream& first = *whole.streams.front();
  for (Stream* other : whole.streams) {
    if (other != &first) first.submit([before = other->mark()] { before->wait(); });
  }
  std::set<Group> groups;
  for (const auto& item : whole.transfers) groups.insert(item.first);
  Communicator::submit(first, groups, [all = whole.transfers] {
    std::vector<std::shared_ptr<Ticket>> tickets;
    for (const auto& [group, transfers] : all) {
      for (const Transfer& one : transfers) runtime().network.carry(one.sends ? one.size() : 0);
      tickets.push_back(group->post(transfers));
    }
    for (const auto& ticket : tickets) ticket->wait();
  });
  const auto done = first.mark();
  for (Stream* other : whole.streams) {
    if (other != &first) other->submit([done] { done->wait(); });
  }
  return C_SUCCESS;
}

// A send outside a group does not wait for the other side: Paddle's batch_isend_irecv relies on it, since it opens no
// group on a plugin's device.
C_Status transfer(const char* name, bool sends, void* memory, size_t bytes, size_t peer, C_CCLComm comm,
                  C_Stream stream) {
  std::byte* own = runtime().own(memory, bytes);
  if (!own) return refuse(name + std::string(": not device memory"));
  count(name, bytes);
  if (runtime().lies.about("send")) return C_SUCCESS;
  const Group group = as_group(comm);
  const auto one = sends ? group->sending(peer, "send", own, bytes) : group->receiving(peer, "send", own, bytes);
  if (batch.depth > 0) {
    batch.transfers[group].push_back(one);
    batch.streams.push_back(&as_stream(stream));
  } else {
    Communicator::submit(as_stream(stream), {group}, [group, one, sends, bytes] {
      if (sends) {
        runtime().network.carry(bytes);
        group->post({one.detached()});
      } else {
        group->post({one})->wait();
      }
    });
  }
  return C_SUCCESS;
}

C_Status xccl_send(void* memory, size_t n, C_DataType type, size_t peer, C_CCLComm comm, C_Stream stream) {
  return transfer("send", true, memory, n * size_of(type), peer, comm, stream);
}

C_Status xccl_recv(void* memory, size_t n, C_DataType type, size_t peer, C_CCLComm comm, C_Stream stream) {
  return transfer("recv", false, memory, n * size_of(type), peer, comm, stream);
}

}  // namespace

// ---- what tests call

extern "C" {

// {"counts": {call: [times, bytes]}, "devices": [[capacity, bytes, peak], ...], "pinned": bytes}. Returns its length.
size_t test_device_report(char* text, size_t size) {
  std::string devices;
  for (const auto& device : runtime().devices) {
    const Arena& arena = device->arena;
    devices += (devices.empty() ? "[" : ", [") + std::to_string(arena.capacity()) + ", " +
               std::to_string(arena.bytes()) + ", " + std::to_string(arena.peak()) + "]";
  }
  const std::string report = "{\"counts\": " + runtime().counters.json() + ", \"devices\": [" + devices +
                             "], \"pinned\": " + std::to_string(runtime().pinned.bytes()) + "}";
  std::snprintf(text, size, "%s", report.c_str());
  return report.size();
}

void test_device_reset() {
  runtime().counters.reset();
  for (const auto& device : runtime().devices) device->arena.reset_peak();
}

// Bytes per second between host and device, each way; 0 for no limit.
void test_device_set_speed(double speed) { runtime().set_speed(speed); }

// Bytes per second of what a rank gives to collectives; 0 for no limit.
void test_device_set_network_speed(double speed) { runtime().network.set_speed(speed); }

// Let the collectives of these names (with blanks before and behind) succeed without doing anything, from now on.
void test_device_lie(const char* names) { runtime().lies.set(names); }

// Let streams begin no further work, or go on.
void test_device_hold(int hold) { runtime().gate.set(hold == 0); }

// The counterparts of cudaHostRegister, cudaHostUnregister, cudaMemcpy (kinds 1: to the device, 2: to the host, 3:
// within) and cudaMemcpyAsync, with raw addresses. They return 0 or an error.
int test_device_host_register(const void* address, size_t size) {
  count("host_register", size);
  runtime().pinned.add(address, size);
  return 0;
}

int test_device_host_unregister(const void* address) { return runtime().pinned.remove(address) ? 0 : C_ERROR; }

int test_device_copy(void* to, const void* from, size_t size, int kind) {
  if (kind < 1 || kind > 3) return refuse("copy: kind must be 1, 2 or 3");
  return runtime().copy_now("copy", static_cast<Direction>(kind - 1), to, from, size);
}

int test_device_copy_async(void* to, const void* from, size_t size, int kind, void* stream) {
  if (kind < 1 || kind > 3) return refuse("copy_async: kind must be 1, 2 or 3");
  Stream& queue = *static_cast<Stream*>(stream);
  return runtime().copy_later("copy_async", static_cast<Direction>(kind - 1), queue, to, from, size);
}

void InitPlugin(CustomRuntimeParams* params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  params->device_type = const_cast<char*>("test_device");
  params->sub_device_type = const_cast<char*>("none");
  C_DeviceInterface& calls = *params->interface;
  std::memset(static_cast<void*>(&calls), 0, sizeof calls);
  calls.size = sizeof calls;

  calls.init_device = init_device;
  calls.deinit_device = init_device;
  calls.set_device = set_device;
  calls.get_device = get_device;
  calls.synchronize_device = synchronize_device;
  calls.get_device_count = get_device_count;
  calls.get_device_list = get_device_list;
  calls.device_memory_stats = device_memory_stats;
  calls.device_min_chunk_size = device_min_chunk_size;

  calls.create_stream = create_stream;
  calls.destroy_stream = destroy_stream;
  calls.query_stream = query_stream;
  calls.synchronize_stream = synchronize_stream;
  calls.stream_add_callback = stream_add_callback;
  calls.create_event = create_event;
  calls.destroy_event = destroy_event;
  calls.record_event = record_event;
  calls.query_event = query_event;
  calls.synchronize_event = synchronize_event;
  calls.stream_wait_event = stream_wait_event;

  calls.device_memory_allocate = device_memory_allocate;
  calls.device_memory_deallocate = device_memory_deallocate;
  calls.device_memory_set = device_memory_set;
  calls.host_memory_allocate = host_memory_allocate;
  calls.host_memory_deallocate = host_memory_deallocate;
  calls.memory_copy_h2d = memory_copy_h2d;
  calls.memory_copy_d2h = memory_copy_d2h;
  calls.memory_copy_d2d = memory_copy_d2d;
  calls.memory_copy_p2p = memory_copy_p2p;
  calls.async_memory_copy_h2d = async_copy_h2d;
  calls.async_memory_copy_d2h = async_copy_d2h;
  calls.async_memory_copy_d2d = async_copy_d2d;
  calls.async_memory_copy_p2p = async_copy_p2p;

  calls.xccl_get_unique_id_size = xccl_get_unique_id_size;
  calls.xccl_get_unique_id = xccl_get_unique_id;
  calls.xccl_comm_init_rank = xccl_comm_init_rank;
  calls.xccl_destroy_comm = xccl_destroy_comm;
  calls.xccl_broadcast = xccl_broadcast;
  calls.xccl_all_reduce = xccl_all_reduce;
  calls.xccl_reduce = xccl_reduce;
  calls.xccl_all_gather = xccl_all_gather;
  calls.xccl_reduce_scatter = xccl_reduce_scatter;
  if (test_device::setting("TEST_DEVICE_NO_ALL_TO_ALL", 0) == 0) calls.xccl_all_to_all = xccl_all_to_all;
  calls.xccl_group_start = xccl_group_start;
  calls.xccl_group_end = xccl_group_end;
  calls.xccl_send = xccl_send;
  calls.xccl_recv = xccl_recv;

  if (test_device::setting("TEST_DEVICE_NO_KERNELS", 0) == 0) test_device::register_kernels("test_device");
}

}  // extern "C"
