// logind plays systemd-logind to a kubelet, on the bus that DBUS_SYSTEM_BUS_ADDRESS names: SIGUSR1
// announces that the machine is shut down, and the program ends when nothing holds this up any more.
package main

import (
	"io"
	"log"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/godbus/dbus/v5"
	"github.com/godbus/dbus/v5/prop"
)

const (
	service = "org.freedesktop.login1"
	place   = dbus.ObjectPath("/org/freedesktop/login1")
	face    = service + ".Manager"
	delay   = 300 * time.Second
	sent    = time.Second // an answer has been sent by then
)

type manager struct{ held sync.WaitGroup }

// Inhibit holds up a shutdown for as long as the returned file is open.
func (m *manager) Inhibit(what, who, why, mode string) (dbus.UnixFD, *dbus.Error) {
	read, write, err := os.Pipe()
	if err != nil {
		return 0, dbus.MakeFailedError(err)
	}
	m.held.Add(1)
	time.AfterFunc(sent, func() { write.Close() })
	go func() {
		io.Copy(io.Discard, read)
		m.held.Done()
	}()
	return dbus.UnixFD(write.Fd()), nil
}

func main() {
	announced := make(chan os.Signal, 1)
	signal.Notify(announced, syscall.SIGUSR1)
	bus, err := dbus.ConnectSystemBus()
	if err != nil {
		log.Fatal(err)
	}
	made := &manager{}
	if err := bus.Export(made, place, face); err != nil {
		log.Fatal(err)
	}
	most := map[string]*prop.Prop{"InhibitDelayMaxUSec": {Value: uint64(delay.Microseconds())}}
	if _, err := prop.Export(bus, place, prop.Map{face: most}); err != nil {
		log.Fatal(err)
	}
	if _, err := bus.RequestName(service, dbus.NameFlagDoNotQueue); err != nil {
		log.Fatal(err)
	}
	log.Print("ready")
	<-announced
	if err := bus.Emit(place, face+".PrepareForShutdown", true); err != nil {
		log.Fatal(err)
	}
	made.held.Wait()
}
