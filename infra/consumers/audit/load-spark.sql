-- Read the events for audit.sql with Spark: put your files in place of 'events.jsonl'. A line that cannot be read is an error.
CREATE OR REPLACE TEMPORARY VIEW lines (
  type STRING, id STRING, source STRING, time STRING, reporter STRING, reporterepoch STRING, reporterseq STRING,
  data STRUCT<Reason: STRING, LastReporterSeq: BIGINT, PreviousEpoch: STRING, PreviousLastReporterSeq: BIGINT,
    Count: BIGINT, CloudEventIds: ARRAY<STRING>, Vm: STRUCT<VmId: STRING>>
) USING json OPTIONS (path 'events.jsonl', mode 'FAILFAST');

CREATE OR REPLACE TEMPORARY VIEW events AS
SELECT type, id, source, reporter, reporterepoch AS epoch, try_cast(reporterseq AS BIGINT) AS number,
  unix_micros(try_cast(time AS TIMESTAMP)) / 1e6 AS seconds, data.Reason AS reason, data.LastReporterSeq AS claimed,
  data.PreviousEpoch AS previous, data.PreviousLastReporterSeq AS previous_last, data.Count AS lost,
  data.CloudEventIds AS listed, data.Vm.VmId AS vm_id, data IS NOT NULL AS has_data
FROM lines;

CACHE TABLE events;

CREATE OR REPLACE TEMPORARY VIEW listed AS
SELECT explode(listed) AS id, reporter, epoch FROM events WHERE reporter IS NOT NULL;
