// Makes calls of a library for another process, whose memory it sees: the tests' process is of this machine, this one
// is of another architecture and emulated. What a function touches of its caller's memory is copied, page by page, when
// it does, and what it has changed is written back behind the call. So arguments are addresses as ever, whatever they
// point to, and an address that is nobody's ends this process.
//
//   guest LIBRARY MEMORY     MEMORY: a descriptor of the caller's /proc/self/mem
//
// Requests come through standard input, in words of 64 bits: 0, the length of a name, the name, for its address; or an
// address, the number of integers, that of floats, and all of these. The answer is one word.
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

namespace {

constexpr uint64_t kPage = 4096, kPart = 65536;  // bytes: at least, and where so much of the caller's is there
constexpr int kMostParts = 1 << 16, kRegisters = 8, kMostInts = 32;

struct Part {
  char* from;
  uint64_t bytes;
};

int memory;    // the caller's
int pristine;  // what has been copied of it, part after part
Part parts[kMostParts];
int num_parts = 0;
off_t num_copied = 0;
std::atomic_flag locked = ATOMIC_FLAG_INIT;
alignas(64) char buffer[kPart];

[[noreturn]] void fail(const char* what, uint64_t where) {
  dprintf(2, "guest: %s, at %#lx\n", what, static_cast<unsigned long>(where));
  _exit(1);
}

bool is_copied(uint64_t address) {
  for (int i = num_parts - 1; i >= 0; --i) {
    if (address - reinterpret_cast<uint64_t>(parts[i].from) < parts[i].bytes) return true;
  }
  return false;
}

// Copies what lies around the address. In one step it is there with all it holds: other threads may wait for it.
bool copy(uint64_t address, uint64_t bytes) {
  const uint64_t from = address & ~(bytes - 1);
  if (pread(memory, buffer, bytes, static_cast<off_t>(from)) != static_cast<ssize_t>(bytes)) return false;
  if (pwrite(pristine, buffer, bytes, num_copied) != static_cast<ssize_t>(bytes)) fail("no memory", address);
  void* const place = reinterpret_cast<void*>(from);
  void* const made = mmap(place, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made != place) {  // something is there already
    if (made != MAP_FAILED) munmap(made, bytes);
    return false;
  }
  void* const whole = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, pristine, num_copied);
  if (mremap(whole, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, place) != place) fail("no memory", address);
  if (num_parts == kMostParts) fail("too much memory", address);
  parts[num_parts++] = {static_cast<char*>(place), bytes};
  num_copied += static_cast<off_t>(bytes);
  return true;
}

void on_fault(int, siginfo_t* info, void*) {
  const uint64_t address = reinterpret_cast<uint64_t>(info->si_addr);
  while (locked.test_and_set(std::memory_order_acquire)) {
  }
  if (!is_copied(address) && !copy(address, kPart) && !copy(address, kPage)) fail("nobody's memory", address);
  locked.clear(std::memory_order_release);
}

// What has changed goes to the caller, byte by byte, as others may write what lies between. All is forgotten then.
void give_back() {
  off_t at = 0;
  for (int i = 0; i < num_parts; at += static_cast<off_t>(parts[i].bytes), ++i) {
    const Part& part = parts[i];
    if (pread(pristine, buffer, part.bytes, at) != static_cast<ssize_t>(part.bytes)) fail("lost a copy", 0);
    for (uint64_t first = 0; first < part.bytes; ++first) {
      if (first % kPage == 0 && memcmp(buffer + first, part.from + first, kPage) == 0) {
        first += kPage - 1;
        continue;
      }
      uint64_t end = first;
      while (end < part.bytes && buffer[end] != part.from[end]) ++end;
      const uint64_t count = end - first, address = reinterpret_cast<uint64_t>(part.from) + first;
      if (count == 0) continue;
      if (pwrite(memory, part.from + first, count, static_cast<off_t>(address)) != static_cast<ssize_t>(count)) {
        fail("memory that is only read was written", address);
      }
      first = end - 1;
    }
    munmap(part.from, part.bytes);
  }
  num_parts = 0;
  num_copied = 0;
}

bool receive(void* to, size_t bytes) {
  return fread(to, 1, bytes, stdin) == bytes;
}

// Integers go through registers, and the others through the stack, in words; floats through registers of their own.
uint64_t call(uint64_t address, const uint64_t* ints, const float* floats) {
  typedef uint64_t Word;
  typedef Word (*Function)(Word, Word, Word, Word, Word, Word, Word, Word, float, float, float, float, float, float,
                           float, float, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word,
                           Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word);
  const Function function = reinterpret_cast<Function>(address);
  const uint64_t *i = ints, *s = ints + kRegisters;
  const float* f = floats;
  return function(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], s[0],
                  s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11], s[12], s[13], s[14], s[15], s[16],
                  s[17], s[18], s[19], s[20], s[21], s[22], s[23]);
}

uint64_t look_up(void* library) {
  uint64_t length;
  char name[256] = {};
  if (!receive(&length, sizeof length) || length >= sizeof name || !receive(name, length)) exit(0);
  return reinterpret_cast<uint64_t>(dlsym(library, name));
}

uint64_t answer(void* library) {
  uint64_t head[3], ints[kMostInts] = {};
  float floats[kRegisters] = {};
  if (!receive(head, sizeof head[0])) exit(0);
  if (head[0] == 0) return look_up(library);
  if (!receive(head + 1, 2 * sizeof head[0]) || head[1] > kMostInts || head[2] > kRegisters) exit(0);
  if (!receive(ints, head[1] * sizeof ints[0]) || !receive(floats, head[2] * sizeof floats[0])) exit(0);
  const uint64_t result = call(head[0], ints, floats);
  give_back();
  return result;
}

}  // namespace

// The library's threads begin with all signals blocked; but a fault is how memory comes.
extern "C" int pthread_sigmask(int how, const sigset_t* set, sigset_t* before) {
  sigset_t own = {};
  if (set != nullptr) {
    own = *set;
    sigdelset(&own, SIGSEGV);
    sigdelset(&own, SIGBUS);
  }
  return sigprocmask(how, set == nullptr ? nullptr : &own, before);
}

int main(int count, char** args) {
  if (count != 3) return fprintf(stderr, "guest LIBRARY MEMORY\n"), 2;
  memory = atoi(args[2]);
  pristine = memfd_create("pristine", 0);
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
  void* library = dlopen(args[1], RTLD_NOW);
  if (library == nullptr) return fprintf(stderr, "%s\n", dlerror()), 1;
  for (;;) {
    const uint64_t result = answer(library);
    fwrite(&result, sizeof result, 1, stdout);
    fflush(stdout);
  }
}
