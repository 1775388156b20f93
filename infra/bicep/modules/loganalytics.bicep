metadata description = 'A table in Log Analytics for Scheduled Events, and who may write into it through the Logs Ingestion API. Deploy it on its own, into the resource group of the workspace.'

param name string = 'imds-bridge'

@description('The region of the workspace.')
param location string = resourceGroup().location
param tags object = {}

@description('The name of the Log Analytics workspace.')
param workspaceName string

@description('Principal ids of the identities whose sinks write.')
param publisherIds string[]

param retentionInDays int = 30

var metricsPublisher = subscriptionResourceId('Microsoft.Authorization/roleDefinitions', '3913510d-42f4-4e42-8a64-420c390055eb')
var publishers = union(publisherIds, []) // somebody who is named twice gets the role once
var tableName = 'ScheduledEvents_CL'
var columns = [
  {
    name: 'TimeGenerated'
    type: 'datetime'
  }
  {
    name: 'CloudEventId'
    type: 'string'
  }
  {
    name: 'CloudEventTime'
    type: 'datetime'
  }
  {
    name: 'CloudEventType'
    type: 'string'
  }
  {
    name: 'EventId'
    type: 'string'
  }
  {
    name: 'EventType'
    type: 'string'
  }
  {
    name: 'EventStatus'
    type: 'string'
  }
  {
    name: 'EventSource'
    type: 'string'
  }
  {
    name: 'NotBefore'
    type: 'datetime'
  }
  {
    name: 'Resources'
    type: 'dynamic'
  }
  {
    name: 'VmName'
    type: 'string'
  }
  {
    name: 'Summary'
    type: 'string'
  }
]

resource workspace 'Microsoft.OperationalInsights/workspaces@2023-09-01' existing = {
  name: workspaceName
}

resource table 'Microsoft.OperationalInsights/workspaces/tables@2022-10-01' = {
  parent: workspace
  name: tableName
  properties: {
    retentionInDays: retentionInDays
    schema: {
      name: tableName
      columns: columns
    }
  }
}

// Direct: the rule has an endpoint of its own. Only private link needs a data collection endpoint.
resource rule 'Microsoft.Insights/dataCollectionRules@2023-03-11' = {
  name: name
  location: location
  tags: tags
  kind: 'Direct'
  properties: {
    streamDeclarations: {
      'Custom-${tableName}': {
        columns: columns
      }
    }
    destinations: {
      logAnalytics: [
        {
          workspaceResourceId: workspace.id
          name: 'workspace'
        }
      ]
    }
    dataFlows: [
      {
        streams: [
          'Custom-${tableName}'
        ]
        destinations: [
          'workspace'
        ]
        transformKql: 'source'
        outputStream: 'Custom-${tableName}'
      }
    ]
  }
  dependsOn: [
    table
  ]
}

resource publisherWrites 'Microsoft.Authorization/roleAssignments@2022-04-01' = [for id in publishers: {
  scope: rule
  name: guid(rule.id, id, metricsPublisher)
  properties: {
    roleDefinitionId: metricsPublisher
    principalId: id
    principalType: 'ServicePrincipal'
  }
}]

@description('The `url` of the sink.')
output url string = '${rule.properties.endpoints.logsIngestion}/dataCollectionRules/${rule.properties.immutableId}/streams/Custom-${tableName}?api-version=2023-01-01'
