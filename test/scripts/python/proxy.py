"""A TCP proxy that disturbs: proxy.py PORT_FILE FAULT AFTER_BYTES SEED

It listens at a free port of 127.0.0.1, which it writes to PORT_FILE. Each connection begins with 64 bytes that say where
it goes (test/net_ops.cpp). Once AFTER_BYTES have passed, over all connections, the fault begins:

  delay      every piece of data waits up to 20 ms
  flap       nothing passes for half a second, again and again, for as long in between
  trickle    data pass in pieces of at most 1 KB, with pauses
  stall      the connection that is active then lets nothing pass any more; its ends stay open
  stall-all  all of them
  reset      the connection is reset at both ends
  close      it is closed at both ends, with what has not been passed on
  half       it is closed in one direction
  late       (from the beginning) the first three connections are closed as soon as they come
"""
import asyncio
import random
import socket
import struct
import sys

port_file, fault, after, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
random.seed(seed)
passed = connections = 0
struck = None  # the connection that the fault has struck


def reset(writer):
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def for_ever():
    await asyncio.Event().wait()


async def pump(reader, writer, ends, number):
    global passed, struck
    loop = asyncio.get_running_loop()
    while data := await reader.read(65536):
        passed += len(data)
        if passed > after:
            if struck is None:
                struck = number
            if fault == "delay":
                await asyncio.sleep(random.uniform(0, 0.02))
            elif fault == "flap" and loop.time() % 1 < 0.5:
                await asyncio.sleep(0.5 - loop.time() % 1)
            elif fault == "trickle":
                for begin in range(0, len(data), 1024):
                    writer.write(data[begin:begin + 1024])
                    await writer.drain()
                    await asyncio.sleep(0.001)
                continue
            elif fault == "stall-all" or (fault == "stall" and struck == number):
                await for_ever()
            elif struck == number and fault in ("reset", "close", "half"):
                writer.write(data[:len(data) // 2])
                if fault == "half":
                    writer.write_eof()
                    await for_ever()
                for end in ends:
                    reset(end) if fault == "reset" else end.close()
                return
        writer.write(data)
        await writer.drain()
    writer.write_eof()


async def serve(reader, writer):
    global connections
    connections += 1
    number = connections
    host, port = (await reader.readexactly(64)).rstrip(b"\0").decode().split()
    if fault == "late" and number <= 3:
        return writer.close()
    try:
        its_reader, its_writer = await asyncio.open_connection(host, int(port))
    except OSError:  # nobody listens there, or not yet
        return reset(writer)
    ends = (writer, its_writer)
    await asyncio.gather(pump(reader, its_writer, ends, number), pump(its_reader, writer, ends, number),
                         return_exceptions=True)
    for end in ends:
        end.close()


async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    with open(port_file, "w") as file:
        print(server.sockets[0].getsockname()[1], file=file)
    await server.serve_forever()


asyncio.run(main())
