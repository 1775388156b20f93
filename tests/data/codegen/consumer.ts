// What a consumer writes with the generated types: each type has its own data.
import type { ApprovalRejected, EventScheduledDataV1, ImdsBridgeEvent } from "./events";

export function summary(event: ImdsBridgeEvent): string {
  switch (event.type) {
    case "io.imdsbridge.scheduledevent.scheduled.v1": {
      const alone: EventScheduledDataV1 = event.data;
      return `${alone.EventId}: ${event.data.Resources?.join()}, session ${event.data.ApprovalSession ?? "none"}`;
    }
    case "io.imdsbridge.scheduledevent.ended.v1": {
      const rebooted: boolean | null | undefined = event.data.VmRebooted;
      return `${event.data.EventStatus} ${rebooted}`;
    }
    case "io.imdsbridge.approval.rejected.v1": {
      const receipt: ApprovalRejected = event;
      return `${receipt.causationid}: ${receipt.data.Outcome} ${receipt.data.Command.Id}`;
    }
    // @ts-expect-error: no event has this type
    case "io.imdsbridge.other.v1":
      return "";
    default:
      return event.data.Vm === undefined ? event.source : event.reporterseq === undefined ? "" : event.id;
  }
}
